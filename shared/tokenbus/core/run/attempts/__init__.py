"""After an attempt: its report, and the decision to retry, to continue or to fall back to another model."""
