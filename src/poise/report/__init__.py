"""Figures as small SVG elements, and reports that are one HTML file: no script, no network, always the same bytes."""
