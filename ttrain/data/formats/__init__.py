"""Forms of files beside plain text: compressed ones, and tables."""
