"""Preflight: what is wrong with a host, told from its survey by rules that are data. For the controller; needs jinja2, Ansible's own.

No host is asked here. :mod:`rules` reads preflight/rules.yml, :mod:`judge` holds a host's info against it, :mod:`compare` tells two hosts
apart, :mod:`pains` says who owns which known pain, :mod:`results` keeps what was found, and :mod:`wording` has the words that terminal
and page share. terminal_reports/preflight.py shows it.
"""
