"""What the report of two dumps and the report of tokens have in common: page, blocks about tokens, words."""
