"""Requests, their queue, and the predictors that compute them."""
