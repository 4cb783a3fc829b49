"""`tokenbus spend`: what the gateway's keys spent."""
