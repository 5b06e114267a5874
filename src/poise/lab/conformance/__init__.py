"""Conformance of policies: the laws that every policy keeps, checked in small worlds that are full of ties and trouble."""
