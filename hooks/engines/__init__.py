"""What each engine's model, rows and topology look like."""
