"""Figures as small SVG elements, reports that are one HTML file: no network, no scripts but ours, always the same bytes."""
