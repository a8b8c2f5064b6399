// Products of A [k, m] and B [k, n].
PRODUCT(product_tn_4, false, false, false, 4)
PRODUCT(product_tn_8, false, false, false, 8)
PRODUCT(exact_product_tn_4, false, false, true, 4)
