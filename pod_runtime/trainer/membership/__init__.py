"""A trainer as a member of its stage: it joins, agrees, keeps the state and leaves."""
