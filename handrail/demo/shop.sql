-- The shop of the demo: its tables and everything in it, made anew in one transaction.
-- Every customer mail of messages.jsonl is about one of the stories below. "Today" is 2026-08-06.

BEGIN IMMEDIATE;

DROP TABLE IF EXISTS outbox;
DROP TABLE IF EXISTS support_requests;
DROP TABLE IF EXISTS charges;
DROP TABLE IF EXISTS orders;
DROP TABLE IF EXISTS refund_rules;
DROP TABLE IF EXISTS customers;

CREATE TABLE customers (
    customer_id   TEXT PRIMARY KEY,
    name          TEXT NOT NULL,
    email         TEXT NOT NULL UNIQUE COLLATE NOCASE,
    payment_token TEXT NOT NULL -- private: no method of the shop ever returns it
);

-- What the shop grants by itself. A limit or a window that is NULL does not apply.
CREATE TABLE refund_rules (
    channel     TEXT PRIMARY KEY,
    policy      TEXT NOT NULL CHECK (policy IN ('automatic', 'person', 'forbidden')),
    limit_cents INTEGER CHECK (limit_cents > 0),
    within_days INTEGER CHECK (within_days >= 0),
    wording     TEXT NOT NULL -- what customers are told
);

CREATE TABLE orders (
    order_id     TEXT PRIMARY KEY,
    customer_id  TEXT NOT NULL REFERENCES customers,
    item         TEXT NOT NULL,
    amount_cents INTEGER NOT NULL CHECK (amount_cents > 0),
    currency     TEXT NOT NULL CHECK (length(currency) = 3),
    channel      TEXT NOT NULL REFERENCES refund_rules,
    status       TEXT NOT NULL CHECK (status IN ('paid', 'shipped', 'cancelled', 'refunded')),
    placed_on    TEXT NOT NULL,
    version      INTEGER NOT NULL DEFAULT 1 -- moves with the order and with each of its charges
);
CREATE INDEX orders_by_customer ON orders (customer_id, placed_on);

-- Amounts are positive and in the order's currency; the kind says in which direction money moved.
CREATE TABLE charges (
    charge_id    TEXT PRIMARY KEY,
    order_id     TEXT NOT NULL REFERENCES orders,
    kind         TEXT NOT NULL CHECK (kind IN ('authorization', 'capture', 'void', 'refund')),
    amount_cents INTEGER NOT NULL CHECK (amount_cents > 0),
    charged_time TEXT NOT NULL,
    reference    TEXT NOT NULL, -- the payment that this line records, as the bank names it
    reverses     TEXT REFERENCES charges,
    CHECK ((kind IN ('void', 'refund')) = (reverses IS NOT NULL))
);
CREATE INDEX charges_by_order ON charges (order_id, charged_time);

CREATE TABLE support_requests (
    request_id  TEXT PRIMARY KEY,
    email       TEXT NOT NULL,
    text        TEXT NOT NULL,
    received_on TEXT NOT NULL
);

-- The unique key is what makes "send" safe to repeat. A request is answered when it has a mail here.
CREATE TABLE outbox (
    key         TEXT PRIMARY KEY,
    customer_id TEXT NOT NULL REFERENCES customers,
    request_id  TEXT REFERENCES support_requests,
    text        TEXT NOT NULL
);

INSERT INTO refund_rules (channel, policy, limit_cents, within_days, wording) VALUES
    ('card',     'automatic', 50000, 60,
     'We return a double charge to your card up to 500.00, within 60 days of the order.'),
    ('wallet',   'automatic', 25000, 30,
     'We return a double charge to your wallet up to 250.00, within 30 days of the order.'),
    ('invoice',  'person', NULL, NULL,
     'Invoices are corrected by a colleague in accounting.'),
    ('giftcard', 'forbidden', NULL, NULL,
     'Gift cards cannot be refunded. The balance stays on the card and can be spent.');

INSERT INTO customers (customer_id, name, email, payment_token) VALUES
    ('c-01', 'Ana Lindqvist',   'ana.lindqvist@example.com',   'vault-7d01'),
    ('c-02', 'Tom Achebe',      'tom.achebe@example.org',      'vault-7d02'),
    ('c-03', 'Mei Tanaka',      'mei.tanaka@example.com',      'vault-7d03'),
    ('c-04', 'Jonas Weber',     'jonas.weber@example.net',     'vault-7d04'),
    ('c-05', 'Priya Raman',     'priya.raman@example.com',     'vault-7d05'),
    ('c-06', 'Lucia Ferri',     'lucia.ferri@example.org',     'vault-7d06'),
    ('c-07', 'Sam Okafor',      'sam.okafor@example.com',      'vault-7d07'),
    ('c-08', 'Nora Haugen',     'nora.haugen@example.net',     'vault-7d08'),
    ('c-09', 'Diego Molina',    'diego.molina@example.com',    'vault-7d09'),
    ('c-10', 'Grace Kim',       'grace.kim@example.org',       'vault-7d10'),
    ('c-11', 'Omar Haddad',     'omar.haddad@example.com',     'vault-7d11'),
    ('c-12', 'Felix Brandt',    'felix.brandt@example.net',    'vault-7d12'),
    ('c-13', 'Viktor Petrov',   'viktor.petrov@example.com',   'vault-7d13'),
    ('c-14', 'Chloe Martin',    'chloe.martin@example.org',    'vault-7d14'),
    ('c-15', 'Bright Office',   'accounts@bright.example.com', 'vault-7d15'),
    ('c-16', 'Hannah Schulz',   'hannah.schulz@example.net',   'vault-7d16'),
    ('c-17', 'Quinn Mallory',   'quinn.mallory@example.org',   'vault-7d17'),
    ('c-18', 'Rory Blake',      'rory.blake@example.com',      'vault-7d18'),
    ('c-19', 'Dana Cole',       'dana.cole@example.net',       'vault-7d19'),
    ('c-20', 'Ivo Marek',       'ivo.marek@example.org',       'vault-7d20'),
    ('c-21', 'Beth Novak',      'beth.novak@example.com',      'vault-7d21'),
    ('c-22', 'Kofi Mensah',     'kofi.mensah@example.com',     'vault-7d22'),
    ('c-23', 'Elin Berg',       'elin.berg@example.net',       'vault-7d23'),
    ('c-24', 'Paulo Reis',      'paulo.reis@example.org',      'vault-7d24'),
    ('c-25', 'Zoe Carter',      'zoe.carter@example.com',      'vault-7d25'),
    ('c-26', 'Marta Nowak',     'marta.nowak@example.com',     'vault-7d26'),
    ('c-27', 'Ravi Iyer',       'ravi.iyer@example.net',       'vault-7d27'),
    ('c-28', 'Lena Fischer',    'lena.fischer@example.org',    'vault-7d28'),
    ('c-29', 'Hugo Lambert',    'hugo.lambert@example.com',    'vault-7d29'),
    ('c-30', 'Aiko Mori',       'aiko.mori@example.net',       'vault-7d30'),
    ('c-31', 'Pat Doyle',       'pat.doyle@example.org',       'vault-7d31'),
    ('c-32', 'Sofia Greco',     'sofia.greco@example.com',     'vault-7d32'),
    ('c-33', 'Emil Sand',       'emil.sand@example.net',       'vault-7d33');

INSERT INTO orders
    (order_id, customer_id, item, amount_cents, currency, channel, status, placed_on) VALUES
    -- Charged twice, plainly.
    ('HR-1001', 'c-01', 'desk lamp',         4990, 'EUR', 'card',     'shipped',   '2026-08-05'),
    ('HR-1002', 'c-02', 'paperback set',     1800, 'GBP', 'card',     'paid',      '2026-08-04'),
    ('HR-1003', 'c-03', 'rice cooker',      13250, 'USD', 'wallet',   'paid',      '2026-08-05'),
    -- Four orders, one of them charged twice (HR-1006).
    ('HR-1004', 'c-04', 'bicycle bell',      1250, 'EUR', 'card',     'shipped',   '2026-07-11'),
    ('HR-1005', 'c-04', 'rain jacket',       8900, 'EUR', 'card',     'shipped',   '2026-07-19'),
    ('HR-1006', 'c-04', 'saddle bag',        7520, 'EUR', 'card',     'paid',      '2026-08-03'),
    ('HR-1007', 'c-04', 'chain oil',          990, 'EUR', 'card',     'paid',      '2026-08-05'),
    -- Two orders; the mail names the amount of HR-1008.
    ('HR-1008', 'c-05', 'yoga mat',          2340, 'EUR', 'card',     'shipped',   '2026-08-01'),
    ('HR-1009', 'c-05', 'running shoes',     6400, 'EUR', 'card',     'paid',      '2026-08-05'),
    -- Two lines that carry the reference of one payment: charged twice, or written down twice?
    ('HR-1010', 'c-06', 'espresso cups',     5900, 'EUR', 'card',     'paid',      '2026-08-02'),
    -- The order says refunded; no line shows any money going back.
    ('HR-1011', 'c-07', 'office chair',     21000, 'USD', 'card',     'refunded',  '2026-07-20'),
    -- An authorization and its capture: one payment that looks like two in a bank app.
    ('HR-1012', 'c-08', 'wool blanket',      8800, 'EUR', 'card',     'shipped',   '2026-08-04'),
    -- Two orders of one thing, on one day, each paid once.
    ('HR-1013', 'c-09', 'phone case',        3495, 'EUR', 'wallet',   'paid',      '2026-08-05'),
    ('HR-1014', 'c-09', 'phone case',        3495, 'EUR', 'wallet',   'paid',      '2026-08-05'),
    -- Charged twice, and the second one voided the same night.
    ('HR-1015', 'c-10', 'plant pot',         2700, 'USD', 'card',     'shipped',   '2026-08-03'),
    -- Paid in two instalments.
    ('HR-1016', 'c-11', 'coffee grinder',   24000, 'EUR', 'card',     'shipped',   '2026-07-02'),
    ('HR-1017', 'c-12', 'notebook',           850, 'EUR', 'card',     'shipped',   '2026-07-28'),
    -- Charged twice, and above what the shop returns by itself.
    ('HR-1018', 'c-13', 'standing desk',   124900, 'EUR', 'card',     'paid',      '2026-08-04'),
    ('HR-1019', 'c-14', 'scarf',             4000, 'EUR', 'giftcard', 'shipped',   '2026-08-01'),
    ('HR-1020', 'c-15', 'printer paper',    31000, 'EUR', 'invoice',  'shipped',   '2026-07-30'),
    -- Charged twice, 96 days ago.
    ('HR-1021', 'c-16', 'garden hose',       3890, 'EUR', 'card',     'shipped',   '2026-05-02'),
    -- Charged twice, all of them; the mails try to get more.
    ('HR-1022', 'c-17', 'key ring',          1500, 'EUR', 'card',     'paid',      '2026-08-04'),
    ('HR-1023', 'c-18', 'water bottle',      1900, 'EUR', 'card',     'paid',      '2026-08-04'),
    ('HR-1024', 'c-19', 'umbrella',          1650, 'EUR', 'card',     'paid',      '2026-08-03'),
    ('HR-1025', 'c-20', 'cutting board',     3100, 'EUR', 'card',     'paid',      '2026-08-02'),
    ('HR-1026', 'c-21', 'bath towel',        2200, 'EUR', 'card',     'paid',      '2026-08-01'),
    -- Charged twice; the payment provider has a bad day.
    ('HR-1027', 'c-22', 'head torch',        6200, 'EUR', 'card',     'paid',      '2026-08-05'),
    ('HR-1028', 'c-23', 'ski goggles',       4400, 'EUR', 'card',     'paid',      '2026-08-04'),
    ('HR-1029', 'c-24', 'surf wax',          5830, 'EUR', 'card',     'paid',      '2026-08-03'),
    ('HR-1030', 'c-25', 'board game',        7100, 'USD', 'wallet',   'paid',      '2026-08-05'),
    ('HR-1031', 'c-26', 'tea pot',           4650, 'EUR', 'card',     'paid',      '2026-08-05'),
    ('HR-1032', 'c-27', 'tripod',           11200, 'USD', 'card',     'paid',      '2026-08-02'),
    -- Two orders, both charged twice; the mail does not say which is meant.
    ('HR-1033', 'c-28', 'candle holder',     2150, 'EUR', 'card',     'paid',      '2026-08-04'),
    ('HR-1034', 'c-28', 'table cloth',       3320, 'EUR', 'card',     'paid',      '2026-08-05'),
    -- One order, two mails.
    ('HR-1035', 'c-29', 'picture frame',     2999, 'EUR', 'card',     'paid',      '2026-08-05'),
    -- Two orders, both charged twice, a mail for each.
    ('HR-1036', 'c-30', 'lunch box',         1890, 'EUR', 'card',     'paid',      '2026-08-03'),
    ('HR-1037', 'c-30', 'thermos flask',     4120, 'EUR', 'wallet',   'paid',      '2026-08-05'),
    ('HR-1038', 'c-31', 'door mat',          2600, 'GBP', 'card',     'shipped',   '2026-08-01'),
    -- Charged three times.
    ('HR-1039', 'c-32', 'wall clock',        5450, 'EUR', 'card',     'paid',      '2026-08-04'),
    -- c-33: its price is about to be corrected
    ('HR-1040', 'c-33', 'headphones',        6400, 'EUR', 'card',     'paid',      '2026-08-05');

INSERT INTO charges
    (charge_id, order_id, kind, amount_cents, charged_time, reference, reverses) VALUES
    ('ch-1001-1', 'HR-1001', 'capture',         4990, '2026-08-05T09:12:40Z', 'pay-50101', NULL),
    ('ch-1001-2', 'HR-1001', 'capture',         4990, '2026-08-05T09:12:58Z', 'pay-50102', NULL),
    ('ch-1002-1', 'HR-1002', 'capture',         1800, '2026-08-04T20:01:05Z', 'pay-50111', NULL),
    ('ch-1002-2', 'HR-1002', 'capture',         1800, '2026-08-04T20:03:31Z', 'pay-50112', NULL),
    ('ch-1003-1', 'HR-1003', 'capture',        13250, '2026-08-05T02:44:10Z', 'pay-50121', NULL),
    ('ch-1003-2', 'HR-1003', 'capture',        13250, '2026-08-05T02:44:12Z', 'pay-50122', NULL),
    ('ch-1004-1', 'HR-1004', 'capture',         1250, '2026-07-11T11:30:00Z', 'pay-50131', NULL),
    ('ch-1005-1', 'HR-1005', 'authorization',   8900, '2026-07-19T17:20:00Z', 'pay-50141', NULL),
    ('ch-1005-2', 'HR-1005', 'capture',         8900, '2026-07-20T06:00:00Z', 'pay-50141', NULL),
    ('ch-1006-1', 'HR-1006', 'capture',         7520, '2026-08-03T19:05:22Z', 'pay-50151', NULL),
    ('ch-1006-2', 'HR-1006', 'capture',         7520, '2026-08-03T19:06:40Z', 'pay-50152', NULL),
    ('ch-1007-1', 'HR-1007', 'capture',          990, '2026-08-05T08:15:00Z', 'pay-50161', NULL),
    ('ch-1008-1', 'HR-1008', 'capture',         2340, '2026-08-01T13:00:02Z', 'pay-50171', NULL),
    ('ch-1008-2', 'HR-1008', 'capture',         2340, '2026-08-01T13:00:20Z', 'pay-50172', NULL),
    ('ch-1009-1', 'HR-1009', 'capture',         6400, '2026-08-05T16:41:00Z', 'pay-50181', NULL),
    ('ch-1010-1', 'HR-1010', 'capture',         5900, '2026-08-02T10:10:00Z', 'pay-50191', NULL),
    ('ch-1010-2', 'HR-1010', 'capture',         5900, '2026-08-02T10:10:00Z', 'pay-50191', NULL),
    ('ch-1011-1', 'HR-1011', 'capture',        21000, '2026-07-20T15:22:00Z', 'pay-50201', NULL),
    ('ch-1011-2', 'HR-1011', 'capture',        21000, '2026-07-20T15:25:00Z', 'pay-50202', NULL),
    ('ch-1012-1', 'HR-1012', 'authorization',   8800, '2026-08-04T12:00:00Z', 'pay-50211', NULL),
    ('ch-1012-2', 'HR-1012', 'capture',         8800, '2026-08-05T06:00:00Z', 'pay-50211', NULL),
    ('ch-1013-1', 'HR-1013', 'capture',         3495, '2026-08-05T18:30:00Z', 'pay-50221', NULL),
    ('ch-1014-1', 'HR-1014', 'capture',         3495, '2026-08-05T18:52:00Z', 'pay-50231', NULL),
    ('ch-1015-1', 'HR-1015', 'capture',         2700, '2026-08-03T21:11:00Z', 'pay-50241', NULL),
    ('ch-1015-2', 'HR-1015', 'capture',         2700, '2026-08-03T21:11:30Z', 'pay-50242', NULL),
    ('ch-1015-3', 'HR-1015', 'void',            2700, '2026-08-03T23:59:00Z', 'pay-50242', 'ch-1015-2'),
    ('ch-1016-1', 'HR-1016', 'capture',        12000, '2026-07-02T10:00:00Z', 'pay-50251', NULL),
    ('ch-1016-2', 'HR-1016', 'capture',        12000, '2026-08-02T10:00:00Z', 'pay-50252', NULL),
    ('ch-1017-1', 'HR-1017', 'capture',          850, '2026-07-28T09:00:00Z', 'pay-50261', NULL),
    ('ch-1018-1', 'HR-1018', 'capture',       124900, '2026-08-04T14:00:11Z', 'pay-50271', NULL),
    ('ch-1018-2', 'HR-1018', 'capture',       124900, '2026-08-04T14:02:45Z', 'pay-50272', NULL),
    ('ch-1019-1', 'HR-1019', 'capture',         4000, '2026-08-01T17:00:00Z', 'pay-50281', NULL),
    ('ch-1019-2', 'HR-1019', 'capture',         4000, '2026-08-01T17:00:09Z', 'pay-50282', NULL),
    ('ch-1020-1', 'HR-1020', 'capture',        31000, '2026-07-30T08:00:00Z', 'pay-50291', NULL),
    ('ch-1020-2', 'HR-1020', 'capture',        31000, '2026-07-31T08:00:00Z', 'pay-50292', NULL),
    ('ch-1021-1', 'HR-1021', 'capture',         3890, '2026-05-02T12:00:00Z', 'pay-50301', NULL),
    ('ch-1021-2', 'HR-1021', 'capture',         3890, '2026-05-02T12:01:00Z', 'pay-50302', NULL),
    ('ch-1022-1', 'HR-1022', 'capture',         1500, '2026-08-04T09:00:00Z', 'pay-50311', NULL),
    ('ch-1022-2', 'HR-1022', 'capture',         1500, '2026-08-04T09:00:30Z', 'pay-50312', NULL),
    ('ch-1023-1', 'HR-1023', 'capture',         1900, '2026-08-04T10:00:00Z', 'pay-50321', NULL),
    ('ch-1023-2', 'HR-1023', 'capture',         1900, '2026-08-04T10:00:30Z', 'pay-50322', NULL),
    ('ch-1024-1', 'HR-1024', 'capture',         1650, '2026-08-03T11:00:00Z', 'pay-50331', NULL),
    ('ch-1024-2', 'HR-1024', 'capture',         1650, '2026-08-03T11:00:30Z', 'pay-50332', NULL),
    ('ch-1025-1', 'HR-1025', 'capture',         3100, '2026-08-02T12:00:00Z', 'pay-50341', NULL),
    ('ch-1025-2', 'HR-1025', 'capture',         3100, '2026-08-02T12:00:30Z', 'pay-50342', NULL),
    ('ch-1026-1', 'HR-1026', 'capture',         2200, '2026-08-01T13:00:00Z', 'pay-50351', NULL),
    ('ch-1026-2', 'HR-1026', 'capture',         2200, '2026-08-01T13:00:30Z', 'pay-50352', NULL),
    ('ch-1027-1', 'HR-1027', 'capture',         6200, '2026-08-05T14:00:00Z', 'pay-50361', NULL),
    ('ch-1027-2', 'HR-1027', 'capture',         6200, '2026-08-05T14:00:30Z', 'pay-50362', NULL),
    ('ch-1028-1', 'HR-1028', 'capture',         4400, '2026-08-04T15:00:00Z', 'pay-50371', NULL),
    ('ch-1028-2', 'HR-1028', 'capture',         4400, '2026-08-04T15:00:30Z', 'pay-50372', NULL),
    ('ch-1029-1', 'HR-1029', 'capture',         5830, '2026-08-03T16:00:00Z', 'pay-50381', NULL),
    ('ch-1029-2', 'HR-1029', 'capture',         5830, '2026-08-03T16:00:30Z', 'pay-50382', NULL),
    ('ch-1030-1', 'HR-1030', 'capture',         7100, '2026-08-05T17:00:00Z', 'pay-50391', NULL),
    ('ch-1030-2', 'HR-1030', 'capture',         7100, '2026-08-05T17:00:30Z', 'pay-50392', NULL),
    ('ch-1031-1', 'HR-1031', 'capture',         4650, '2026-08-05T18:00:00Z', 'pay-50401', NULL),
    ('ch-1031-2', 'HR-1031', 'capture',         4650, '2026-08-05T18:00:30Z', 'pay-50402', NULL),
    ('ch-1032-1', 'HR-1032', 'capture',        11200, '2026-08-02T19:00:00Z', 'pay-50411', NULL),
    ('ch-1032-2', 'HR-1032', 'capture',        11200, '2026-08-02T19:00:30Z', 'pay-50412', NULL),
    ('ch-1033-1', 'HR-1033', 'capture',         2150, '2026-08-04T08:00:00Z', 'pay-50421', NULL),
    ('ch-1033-2', 'HR-1033', 'capture',         2150, '2026-08-04T08:01:00Z', 'pay-50422', NULL),
    ('ch-1034-1', 'HR-1034', 'capture',         3320, '2026-08-05T08:00:00Z', 'pay-50431', NULL),
    ('ch-1034-2', 'HR-1034', 'capture',         3320, '2026-08-05T08:01:00Z', 'pay-50432', NULL),
    ('ch-1035-1', 'HR-1035', 'capture',         2999, '2026-08-05T10:00:00Z', 'pay-50441', NULL),
    ('ch-1035-2', 'HR-1035', 'capture',         2999, '2026-08-05T10:00:40Z', 'pay-50442', NULL),
    ('ch-1036-1', 'HR-1036', 'capture',         1890, '2026-08-03T07:00:00Z', 'pay-50451', NULL),
    ('ch-1036-2', 'HR-1036', 'capture',         1890, '2026-08-03T07:00:20Z', 'pay-50452', NULL),
    ('ch-1037-1', 'HR-1037', 'capture',         4120, '2026-08-05T07:00:00Z', 'pay-50461', NULL),
    ('ch-1037-2', 'HR-1037', 'capture',         4120, '2026-08-05T07:00:20Z', 'pay-50462', NULL),
    ('ch-1038-1', 'HR-1038', 'capture',         2600, '2026-08-01T09:00:00Z', 'pay-50471', NULL),
    ('ch-1039-1', 'HR-1039', 'capture',         5450, '2026-08-04T11:00:00Z', 'pay-50481', NULL),
    ('ch-1039-2', 'HR-1039', 'capture',         5450, '2026-08-04T11:00:20Z', 'pay-50482', NULL),
    ('ch-1039-3', 'HR-1039', 'capture',         5450, '2026-08-04T11:00:40Z', 'pay-50483', NULL),
    ('ch-1040-1', 'HR-1040', 'capture',         6400, '2026-08-05T12:00:00Z', 'pay-50491', NULL),
    ('ch-1040-2', 'HR-1040', 'capture',         6400, '2026-08-05T12:00:30Z', 'pay-50492', NULL);

-- Last, so that what is seeded has version 1.
CREATE TRIGGER a_charge_moves_its_order AFTER INSERT ON charges BEGIN
    UPDATE orders SET version = version + 1 WHERE order_id = NEW.order_id;
END;

COMMIT;
