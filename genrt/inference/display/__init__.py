"""Results shown: as text, HTML and SVG, for matplotlib and pandas."""
