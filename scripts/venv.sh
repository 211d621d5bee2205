# Sourced by the scripts beside it: puts this checkout, with the extras named in $1, into .venv and activates that.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
. .venv/bin/activate
python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${1:+[$1]}"
