"""JSON Schemas that users give: checked, and bounded in size.

Intake and the tool executor share it.
"""
