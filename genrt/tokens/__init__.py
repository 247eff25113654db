"""Tokens, their bytes and texts; rows, and what is drawn from them."""
