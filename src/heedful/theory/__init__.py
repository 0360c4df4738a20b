"""The theory of attention as a program: closed forms, each derived where it stands and tested against samples."""

from heedful.theory import closed_forms

__all__ = ["closed_forms"]
