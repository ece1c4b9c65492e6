"""One record of usage per request, and what keys have used."""
