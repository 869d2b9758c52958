"""`handrail doctor` sees a PostgreSQL server that may forget what it has committed."""

from __future__ import annotations

from sqlalchemy.engine import make_url

from handrail.cli.doctor import FAILURE, WARNING, examine
from handrail.fleet import Fleet
from handrail.testing.services import EmbeddedPostgres


def _codes(url: str, **settings: str) -> tuple[dict[str, str], bool]:
    """The findings about the database, by code, and whether the figures were still read."""
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    query = {"options": options} if options else {}
    address = make_url(url).update_query_dict(query)
    fleet = Fleet(database_url=address.render_as_string(hide_password=False))
    try:
        findings, figures = examine(fleet)
    finally:
        fleet.close()
    levels = {one.code: one.level for one in findings if one.about == "database"}
    assert all(one.next_step for one in findings if one.level in (WARNING, FAILURE))
    return levels, figures is not None


def test_settings_under_which_a_commit_may_be_lost_are_named(postgres: EmbeddedPostgres) -> None:
    """This test server has fsync off, and with the session synchronous_commit is changed."""
    url = postgres.create_database("doctor")
    fleet = Fleet(database_url=url)
    fleet.upgrade_database()
    fleet.close()

    kept, _ = _codes(url, synchronous_commit="on")
    lost, figures = _codes(url, synchronous_commit="off")

    assert kept["postgres-fsync-off"] == WARNING
    assert "postgres-synchronous-commit-off" not in kept and "postgres-old" not in kept
    assert lost["postgres-synchronous-commit-off"] == WARNING
    assert figures
