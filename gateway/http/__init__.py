"""The gateway's HTTP routes: parse what a client sends, render what it gets. They decide nothing."""
