"""The structures of texts, by llguidance: regular expressions, JSON schemas, grammars."""
