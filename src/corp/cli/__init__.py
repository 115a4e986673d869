"""The command line: one file per command, all of them thin."""
