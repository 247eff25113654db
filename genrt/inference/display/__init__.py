"""What shows results: as text, HTML, SVG, for matplotlib and pandas."""
