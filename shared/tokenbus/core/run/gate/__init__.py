"""What policies decide about a run: the drafts that wait for a verdict, and the verdicts on tool calls."""
