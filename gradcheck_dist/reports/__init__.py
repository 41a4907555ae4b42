"""Reports: one document, written as text for a terminal, Markdown for a pull request, or JSON. Imports no torch."""
