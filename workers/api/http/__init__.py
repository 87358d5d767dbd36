"""The HTTP edge that gateway and worker share: bounds, disconnects, event streams, error replies, the request log.

protocol    one connection: bounds on the head, clients that stall
edge        one ASGI middleware: request id, bounds, error replies, metrics and log
body        a request's body, bounded in size and time
disconnect  a client that hangs up cancels the work done for it
stream      server-sent events
errors      the edge's own errors
replies     JSON replies, errors in the OpenAI shape
health      health checks and metrics
"""
