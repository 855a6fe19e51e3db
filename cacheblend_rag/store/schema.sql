-- entries: the chunks whose KV is on disk.
-- nodes: the names, with their documents, to which they came in the order of their numbers. changes: the numbers of those that
-- changed lately; no ids, so that none outlives its name. namespaces: whose they are, where they are a tenant's.
-- tenants: what each has, counted by triggers so that no call counts a million rows.
-- seen: the chunks whose text is in what a chunk's later KV was read behind, by their numbers; what has seen one goes with it.
-- shared: up to where the names that machines share are followed here, where they are.
-- The numbers of changes begin above all that another index in this place gave out.

CREATE TABLE entries (
    key TEXT PRIMARY KEY, bytes INTEGER NOT NULL, last_used INTEGER NOT NULL DEFAULT 0, tenant TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE TABLE nodes (
    seq INTEGER PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, text_hash TEXT NOT NULL,
    token_ids BLOB NOT NULL, separator BLOB NOT NULL, document TEXT, start INTEGER, length INTEGER NOT NULL, ends BLOB NOT NULL,
    later TEXT, behind BLOB, UNIQUE (namespace, id)
);
CREATE TABLE seen (seq INTEGER NOT NULL, other INTEGER NOT NULL, PRIMARY KEY (seq, other)) WITHOUT ROWID;
CREATE TABLE changes (seq INTEGER PRIMARY KEY, node INTEGER NOT NULL);
CREATE TABLE namespaces (namespace TEXT PRIMARY KEY, tenant TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL, names INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE shared (one INTEGER PRIMARY KEY CHECK (one = 1), birth TEXT NOT NULL, position INTEGER NOT NULL);
INSERT INTO changes VALUES (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER), 0);
CREATE INDEX entries_by_use ON entries (last_used);
CREATE INDEX nodes_by_key ON nodes (key);
CREATE INDEX nodes_by_later ON nodes (later) WHERE later IS NOT NULL;
CREATE INDEX seen_by_other ON seen (other);
CREATE INDEX nodes_by_document ON nodes (namespace, document) WHERE document IS NOT NULL;
CREATE TRIGGER seen_changed AFTER UPDATE OF key ON nodes WHEN old.key != new.key BEGIN
    UPDATE nodes SET later = NULL, behind = NULL WHERE seq IN (SELECT seq FROM seen WHERE other = new.seq);
    DELETE FROM seen WHERE other = new.seq;
END;
CREATE TRIGGER seen_removed AFTER DELETE ON nodes BEGIN
    UPDATE nodes SET later = NULL, behind = NULL WHERE seq IN (SELECT seq FROM seen WHERE other = old.seq);
    DELETE FROM seen WHERE other = old.seq;
    DELETE FROM seen WHERE seq = old.seq;
END;
CREATE TRIGGER later_changed AFTER UPDATE OF later ON nodes BEGIN
    DELETE FROM seen WHERE seq = new.seq;
END;
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
    INSERT INTO tenants VALUES (new.tenant, 1, new.bytes, 0) ON CONFLICT DO UPDATE
        SET entries = entries + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER entry_deleted AFTER DELETE ON entries BEGIN
    UPDATE tenants SET entries = entries - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant;
END;
CREATE TRIGGER node_added AFTER INSERT ON nodes BEGIN
    INSERT INTO tenants VALUES (ifnull((SELECT tenant FROM namespaces WHERE namespace = new.namespace), ''), 0, 0, 1)
        ON CONFLICT DO UPDATE SET names = names + 1;
END;
CREATE TRIGGER node_removed AFTER DELETE ON nodes BEGIN
    UPDATE tenants SET names = names - 1 WHERE tenant =
        ifnull((SELECT tenant FROM namespaces WHERE namespace = old.namespace), '');
END;
CREATE TRIGGER node_addition_noted AFTER INSERT ON nodes BEGIN
    INSERT INTO changes (node) VALUES (new.seq);
END;
CREATE TRIGGER node_change_noted AFTER UPDATE OF key, text_hash, token_ids ON nodes BEGIN
    INSERT INTO changes (node) VALUES (new.seq);
END;
CREATE TRIGGER node_removal_noted AFTER DELETE ON nodes BEGIN
    INSERT INTO changes (node) VALUES (old.seq);
END;
CREATE TRIGGER changes_forgotten AFTER INSERT ON changes BEGIN
    DELETE FROM changes WHERE seq <= new.seq - 10000;
END;
