"""What no running server needs: the commands, the soak test, log analysis, training and the fake worker.

May import every other package; none of them imports this one.
"""
