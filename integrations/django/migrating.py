"""One revision of the ledger's schema as an operation of a Django migration."""

from __future__ import annotations

from typing import Any, Final

from django.db import router
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation

from handrail.integrations.django import conf
from handrail.ledger.migrate import statements_of
from handrail.ledger.schema import VERSION_TABLE

FIRST: Final = "0001"


class LedgerRevision(Operation):
    """Run the statements of one revision through Django's connection, in its transaction.

    Only on the ledger's database, and only where `handrail db upgrade` has not done it already.
    """

    reversible = True
    reduces_to_sql = True

    def __init__(self, revision: str) -> None:
        self.revision = revision

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Nothing: the models are unmanaged."""

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: Any,
        to_state: Any,
    ) -> None:
        """Bring the tables to this revision."""
        self._run(app_label, schema_editor, back=False)

    def database_backwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: Any,
        to_state: Any,
    ) -> None:
        """Take the tables back to the revision before; the first one's are dropped."""
        self._run(app_label, schema_editor, back=True)

    def describe(self) -> str:
        """What `migrate --plan` says."""
        return f"Bring Handrail's tables to revision {self.revision}"

    def _run(self, app_label: str, editor: BaseDatabaseSchemaEditor, *, back: bool) -> None:
        connection = editor.connection
        if conf.is_elsewhere() or connection.alias != conf.alias():
            return
        if not router.allow_migrate(connection.alias, app_label):
            return
        postgres = connection.vendor == "postgresql"
        schema = conf.read().database_schema if postgres else ""
        path = ""
        if schema:
            with connection.cursor() as cursor:
                cursor.execute("SHOW search_path")
                path = cursor.fetchone()[0]
            editor.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"', params=None)
            editor.execute(f'SET LOCAL search_path TO "{schema}"', params=None)
        found = None if editor.collect_sql else self._found(editor)
        for statement in self._statements(found, postgres=postgres, back=back):
            editor.execute(statement, params=None)
        if schema:  # Django records the migration in the same transaction
            editor.execute(f"SET LOCAL search_path TO {path}", params=None)

    def _statements(self, found: str | None, *, postgres: bool, back: bool) -> list[str]:
        """What is to be done in a database that is at a revision, whoever brought it there."""
        if back:
            if not found:  # nothing of ours is there, but the note that nothing is
                return [] if found is None else [f"DROP TABLE {VERSION_TABLE}"]
            if found < self.revision:
                return []
            last = [f"DROP TABLE {VERSION_TABLE}"] if self.revision == FIRST else []
            return [*statements_of(self.revision, postgres=postgres, back=True), *last]
        if (found or "") >= self.revision:
            return []
        statements = statements_of(self.revision, postgres=postgres)
        if found is None:
            return statements
        return [one for one in statements if not one.startswith(f"CREATE TABLE {VERSION_TABLE} ")]

    def _found(self, editor: BaseDatabaseSchemaEditor) -> str | None:
        """The revision that the database is at: empty where it was taken back from all, None where
        there never was one.
        """
        connection = editor.connection
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SELECT to_regclass(%s)", [VERSION_TABLE])
                there = cursor.fetchone()[0] is not None
            else:
                there = VERSION_TABLE in connection.introspection.table_names(cursor)
            if not there:
                return None
            cursor.execute(f"SELECT max(version_num) FROM {VERSION_TABLE}")
            return str(cursor.fetchone()[0] or "")
