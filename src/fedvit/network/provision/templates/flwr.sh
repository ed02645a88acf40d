#!/bin/sh
# Flower's command for this study's SuperLink: ./flwr run app, ./flwr list, ./flwr log RUN_ID
cd "$(dirname "$0")" || exit 1
export FLWR_HOME={{ folder }}/flower
{% for name, value in quiet.items() %}
export {{ name }}={{ value }}
{% endfor %}
exec {{ python.rsplit('/', 1)[0] }}/flwr "$@"
