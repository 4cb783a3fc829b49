"""What every service counts and measures: its metrics and gauges, names that may be labels, and when counts are written
to the deployment's activity.
"""
