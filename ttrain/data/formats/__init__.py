"""Forms of files beside plain text: compressed files and tables."""
