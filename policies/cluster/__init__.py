"""The abstract cluster that every policy is written against: events in, actions out."""
