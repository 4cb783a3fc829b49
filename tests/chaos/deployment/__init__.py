"""What a round runs and breaks: servers, the proxy before them, workers and what runs inside of these."""
