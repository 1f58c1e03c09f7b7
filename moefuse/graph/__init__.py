"""Graphs: capture as functional ATen, symbolic sizes, source places, dumps."""
