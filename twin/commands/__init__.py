"""The commands of `twin`: each parses its options, calls a library, prints, and says how it ended."""
