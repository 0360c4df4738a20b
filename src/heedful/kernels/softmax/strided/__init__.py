"""Attention over keys a stride apart: dense or windowed attention inside residue classes."""
