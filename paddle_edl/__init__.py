"""The original's names: what notes and scripts of 2020 start or import, made of EDL's programs.

Each module has the flags and the defaults of its namesake in paddle_edl 0.3.1, and nothing else of
its own. docs/paddle-edl.md says what each one is today. New scripts use EDL's own names.
"""
