"""Tokens, their bytes and texts; rows, and draws from them."""
