"""Enter into a training job what launchers and clients report. Pure."""
