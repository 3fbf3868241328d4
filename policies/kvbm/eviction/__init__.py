"""Which cached blocks of a tier go first, one order per file. None of them ever touches a block that somebody uses."""
