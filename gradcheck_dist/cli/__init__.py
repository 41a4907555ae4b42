"""The command line: one command a file. Modules here import typer and nothing heavy; a command loads what it needs."""
