"""The command line: one file per command, each of them thin. Nothing imports it.

Words come in; the verbs of `corp.api` do the work; tables, JSON and exit codes go out.
"""
