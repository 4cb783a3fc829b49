"""Scripts on single runs: accepting and cancelling, the fence of an attempt, inputs, the index, timeouts."""
