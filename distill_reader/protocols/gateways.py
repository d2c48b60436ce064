"""HTTP statuses by which a gateway says that it cannot have its answer from the server behind it.

That server restarts, or moves: nothing follows about the request, or about what it speaks.
"""

# 502: nobody listens behind it, or the connection ended. Above 511 they are Cloudflare's.
UNREACHED = frozenset({502, 520, 521, 522, 523, 525, 526, 527, 530})
TIMED_OUT = frozenset({504, 524})
# Endpoints of teachers that have answered this process once. A 404 of theirs is that of a gateway
# which forgets the way while the teacher is started again, as Traefik does.
answered: set[str] = set()
