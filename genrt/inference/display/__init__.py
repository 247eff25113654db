"""Results shown: what their text, HTML and SVG are made of."""
