"""The connection to the server: one server, Sentinel, Cluster; scripts and stream reads over it."""
