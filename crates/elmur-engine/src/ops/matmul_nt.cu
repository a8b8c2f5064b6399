// Products of A [m, k] and B [n, k].
PRODUCT(product_nt_4, true, true, false, 4)
PRODUCT(product_nt_8, true, true, false, 8)
PRODUCT(exact_product_nt_4, true, true, true, 4)
