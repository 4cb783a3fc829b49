"""One room for each client protocol: a request translator and encoders. All of them are pure."""
