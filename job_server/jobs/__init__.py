"""What jobs of both types share: their events, one step at work, reports of pods. Pure."""
