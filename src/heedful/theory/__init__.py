"""The theory of attention as code: closed forms, and every statement of the texts as a claim with a verdict."""

from heedful.theory import closed_forms
from heedful.theory.claim import Case, Claim, Evidence, Finding, Text, Verdict, decide

__all__ = ["Case", "Claim", "Evidence", "Finding", "Text", "Verdict", "closed_forms", "decide"]
