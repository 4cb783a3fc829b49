"""What a round runs and breaks: servers, the proxy before them, the workers, and the changes inside these."""
