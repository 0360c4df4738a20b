"""Linear attention with decay, segments and state: one signature, in plain torch and in Triton."""
