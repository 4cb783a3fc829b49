"""One module per provider API: build its request, decode its stream. No IO here.

What an HTTP status or a framing rule means for one provider lives with it; who calls it lives in the services.
"""
