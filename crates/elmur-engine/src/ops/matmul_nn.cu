// Products of A [m, k] and B [k, n].
PRODUCT(product_nn_4, true, false, false, 4)
PRODUCT(product_nn_8, true, false, false, 8)
PRODUCT(exact_product_nn_4, true, false, true, 4)
