"""Request parts that several APIs share: conversation, participants, images, multipart forms.

Each API builds its body in its own package.
"""
